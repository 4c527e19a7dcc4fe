"""The plan: where every byte will live, before anything is loaded; a pure function of spec, machine and options."""
