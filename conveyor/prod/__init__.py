"""The production binding: SQS, DynamoDB, S3 and Redis behind the same ports. Its room is kept apart
from the start; nothing is built in it yet."""
