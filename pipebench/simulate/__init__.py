"""Time without training: a discrete-event simulation of schedules on links."""
