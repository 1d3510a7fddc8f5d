"""Pods on Google Kubernetes Engine: JobSets, queued by Kueue, that restart themselves."""
