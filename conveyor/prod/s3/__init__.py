"""Blobs on S3."""
