"""What a Gemma 4 model is and where its parts are. Reads models; changes none."""
