"""Where steps are kept, on disk or in S3. Client and server both use it."""
