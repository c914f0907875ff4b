"""What bench.py is made of: command line, model shapes, engines, roofline and table."""
