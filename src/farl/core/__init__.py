"""Records, protocols and tensor helpers that every other layer shares; needs torch alone."""
