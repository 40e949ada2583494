"""The format of `tf.train.Example`: its encoding, and its decoding into columns, without TensorFlow."""
