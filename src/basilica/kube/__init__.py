"""What a gang looks like on Kubernetes: manifests, and nothing that calls anybody."""
