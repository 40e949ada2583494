"""Rows of documents, planned in advance."""
