"""What a run tells about itself while it runs: events, metrics, sinks, and the report made of them."""
