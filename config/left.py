"""Flags and settings that left, and what to use instead."""

LEFT = {
    "autoscale": "the number of simulated replicas is --replicas N, or what --plan finds; "
    "./deploy/serve.sh --autoscale hands its values to Ray Serve",
    "deploy": "./compare.sh --replicas N starts each variant as N replicas on Ray Serve, and "
    "./simulate.sh --replicas N simulates them; leave it out",
    "ray": "--jobs N shares simulations among N processes of this machine",
}
