"""What a server on a CPU needs beside the cache."""
