"""Runs reward code that turnwise does not trust: no network, no writes, no secrets; bounded time, memory and output.

A zygote imports the code once, inside the sandbox, and forks for each call. The parent never imports user code,
never unpickles, and believes nothing that it has not checked. Read in this order: `launch` starts the process,
`zygote` is what runs in it, `confine` (with `landlock` and `seccomp`) is how it locks itself in, `client` speaks to it,
`probe` finds out by attack which tier holds here, `pool` is what the scoring code sees.
"""
