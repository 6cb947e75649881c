"""The report page of an evaluation."""
