"""The production binding: DynamoDB, SQS, S3 and Redis behind the same ports."""
