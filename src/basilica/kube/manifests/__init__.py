"""Objects of Kubernetes as plain JSON. Pure: nothing here calls anybody."""
