"""Objects in stores: their URLs, credentials and contents."""
