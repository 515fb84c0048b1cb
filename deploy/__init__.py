"""More than one server: replicas on Ray Serve behind one ingress, plain ones behind a proxy."""
