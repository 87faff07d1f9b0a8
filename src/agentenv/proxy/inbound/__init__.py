"""The HTTP/1.1 server in front of the proxy and the control API: uvicorn's frame, a strict protocol of our own."""
