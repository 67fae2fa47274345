"""The policy's weights to the engines that sample from it, with proof that they arrived."""
