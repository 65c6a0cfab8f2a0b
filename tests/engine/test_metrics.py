"""Names and values of the Prometheus text."""

from prometheus_client.parser import text_string_to_metric_families

from jhybrid.engine.metrics import EngineMetrics, RequestClock


def samples(metrics):
    families = text_string_to_metric_families(metrics.prometheus_text().decode())
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def test_every_series_exists_from_the_start():
    names = {key[0] for key in samples(EngineMetrics())}
    counters = "requests_finished prompt_tokens generation_tokens prefix_tokens prefix_hits"
    counters += " evictions demotions preemptions compilations"
    histograms = "time_to_first_token inter_token_latency e2e_request_latency request_queue_time"
    expected = {"jhybrid:requests", "jhybrid:pool"}
    expected |= {f"jhybrid:{name}_total" for name in counters.split()}
    for name in histograms.split():
        expected |= {f"jhybrid:{name}_seconds_{part}" for part in ("bucket", "count", "sum")}
    assert names == expected
    zero = samples(EngineMetrics())
    assert zero["jhybrid:demotions_total", "committed"] == 0
    assert zero["jhybrid:prefix_hits_total", "dasc-wr"] == 0
    assert zero["jhybrid:pool", "kv_pages", "tree"] == 0


def test_a_request_from_arrival_to_end():
    metrics = EngineMetrics(running=2)
    metrics.pools["kv_pages"]["running"] = 7
    clock = RequestClock(metrics, arrival=100.0)
    clock.on_scheduled(100.5)
    clock.on_scheduled(103.0)  # back after a preemption
    clock.on_tokens(101.0)
    clock.on_tokens(101.0, 0)
    clock.on_tokens(101.4, 2)
    clock.on_finish(102.0, "length")
    seen = samples(metrics)
    assert seen["jhybrid:requests", "running"] == 2
    assert seen["jhybrid:pool", "kv_pages", "running"] == 7
    assert seen["jhybrid:requests_finished_total", "length"] == 1
    assert seen["jhybrid:generation_tokens_total",] == 3
    assert seen["jhybrid:request_queue_time_seconds_sum",] == 0.5
    assert seen["jhybrid:time_to_first_token_seconds_sum",] == 1.0
    assert seen["jhybrid:time_to_first_token_seconds_bucket", "1.0"] == 1
    assert seen["jhybrid:time_to_first_token_seconds_bucket", "0.5"] == 0
    assert seen["jhybrid:inter_token_latency_seconds_count",] == 2
    assert abs(seen["jhybrid:inter_token_latency_seconds_sum",] - 0.4) < 1e-9
    assert seen["jhybrid:e2e_request_latency_seconds_bucket", "+Inf"] == 1
