"""Everything a user may set, as one frozen record; knows no model and no machine."""
