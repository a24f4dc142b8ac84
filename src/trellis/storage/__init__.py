"""Where documents and memory are kept: the object store (`objects`), local or S3, and what is built on it."""
