"""The SDK: one generator per operation, a blocking and an async driver, and the facade."""
