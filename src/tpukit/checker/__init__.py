"""The verdict on a job before chips are rented: does it fit, how long is a step."""
