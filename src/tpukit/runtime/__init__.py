"""What surrounds the program: environment, flags, child processes, hosts, doctor, logs."""
