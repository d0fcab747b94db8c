"""Programs that run as a rank or beside it: started by name, imported by no other package."""
