"""The processes of one attempt at a job: started together, watched together, ended together."""
