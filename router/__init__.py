"""The router: speaks the OpenAI API and pairs each request with a prefill and a decode worker."""
