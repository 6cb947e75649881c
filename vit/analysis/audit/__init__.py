"""Look for problems in labelled images: wrong labels and copies."""
