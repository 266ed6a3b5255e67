# docs/plugins.md: a plugin from the template, its tests and its check.
rlhf plugins new reward my-reward
python -m pip install -qq --no-deps ./rlhf-reward-my-reward
rlhf plugins list > installed.txt
grep my-reward installed.txt
rlhf plugins show rewards/my-reward
rlhf plugins check my-reward
python -m pytest -q -p no:cacheprovider rlhf-reward-my-reward
