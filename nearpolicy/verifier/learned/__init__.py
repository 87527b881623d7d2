"""Rewards that are learned or asked for: reward models, judges, rubrics.

scorers                   what of these a run has: started with it, asked by it, closed with it
judge, rubric             questions, and what their answers are worth
asking, endpoint          requests to an OpenAI-compatible endpoint: limits, retries, budget, strict reading
reward_model              texts, limits and forms of reward models
model_server, model_main  reward models, and judges computed here, in a process of their own
generator_panel           a judge over the Generator protocol
attacks                   what an answer may do to a judge, and how far it moves it
"""
