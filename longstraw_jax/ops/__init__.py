"""Array operations: no modules, no parameters, no configuration."""
