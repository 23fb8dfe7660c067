"""The serving half of OSCAR: pool, attention backend, CPU platform, flags. The only room that knows SGLang."""
