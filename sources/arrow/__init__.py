"""Tables of Arrow: the values of rows that are anywhere in them."""
