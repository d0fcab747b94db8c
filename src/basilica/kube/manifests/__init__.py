"""Objects of Kubernetes as plain JSON. Pure: no module here makes a request."""
