"""The documents: what in them is made from code, and the site that they become."""
