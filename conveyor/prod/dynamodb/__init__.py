"""Records and tasks on one DynamoDB table."""
