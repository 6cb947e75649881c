"""Look for problems in labelled images: labels, duplicates, unusual images."""
