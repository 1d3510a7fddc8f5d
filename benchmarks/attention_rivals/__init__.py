"""What `attention_static.py` compares: cases, contenders, times, and the search for blocks."""
