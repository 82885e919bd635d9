"""What a site looks at by itself."""
