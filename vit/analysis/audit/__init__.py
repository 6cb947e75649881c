"""Look for problems in labelled images: labels, duplicates, odd images, confused classes."""
