"""Flags and settings that left, and what to use instead."""

LEFT = {
    "deploy": "./compare.sh --replicas N starts each variant as N replicas on Ray Serve, and "
    "./simulate.sh --replicas N simulates them; leave it out",
}
