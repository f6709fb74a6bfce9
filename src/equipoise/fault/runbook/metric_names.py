"""The metrics of our server that guides may ask for, by what they are.

Kept true (tests/multi/serve/test_dash_metrics.py)
    The server shows each of them, as what stands here.
"""

METRICS = {
    "equipoise_requests_running": "gauge",
    "equipoise_requests_waiting": "gauge",
    "equipoise_kv_cache_usage_ratio": "gauge",
    "equipoise_kv_cache_pages": "gauge",
    "equipoise_prefix_cache_queries": "counter",
    "equipoise_prefix_cache_hits": "counter",
    "equipoise_preemptions": "counter",
    "equipoise_iterations": "counter",
    "equipoise_iteration_predicted_seconds": "counter",
    "equipoise_iteration_measured_seconds": "counter",
    "equipoise_prompt_tokens": "counter",
    "equipoise_generation_tokens": "counter",
    "equipoise_request_success": "counter",
    "equipoise_admission_rejections": "counter",
    "equipoise_time_to_first_token_seconds": "histogram",
    "equipoise_inter_token_latency_seconds": "histogram",
    "equipoise_e2e_request_latency_seconds": "histogram",
    "equipoise_request_queue_time_seconds": "histogram",
    "equipoise_request_prefill_time_seconds": "histogram",
    "equipoise_request_prompt_tokens": "histogram",
    "equipoise_request_generation_tokens": "histogram",
}
