"""A small, real Diffusers MiniMax-H3 on CPU (`tiny`), packed requests laid out by Diffusers' own blocks
(`packings`), the same in vLLM-Omni's words (`native`), and processes that form a group (`ranks`)."""
