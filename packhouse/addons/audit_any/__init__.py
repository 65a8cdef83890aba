"""`packhouse audit`: what rows of any tool would teach; also of rows whose ids a source gives."""
