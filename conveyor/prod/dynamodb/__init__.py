"""The storage ports on one DynamoDB table; `store` puts them together."""
