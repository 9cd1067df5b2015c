//! Benchmark of building schedules. Results are in `research/benchmark-tables.md`, section "Schedules".

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use hpgo::schedule::{Request, build, one_f_one_b, one_f_one_b_in_flight};

/// Measures each schedule family that is built without a search, at one size.
fn static_schedules(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("order");
    for name in ["gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_v", "dualpipe_v", "chimera"] {
        let request = Request::new(64, 1024);
        let actions = build(name, &request).expect("within its limits").action_count();
        group.throughput(Throughput::Elements(actions as u64));
        group.bench_function(BenchmarkId::new(name, "64x1024"), |bencher| {
            bencher.iter(|| build(name, black_box(&request)).expect("within its limits"));
        });
    }
    group.finish();
}

/// Measures 1F1B at sizes from a planner's candidate to 8.4 million actions.
fn sizes(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("one_f_one_b");
    for (ranks, micro_batches) in [(8, 64), (64, 1024), (1024, 4096)] {
        let max_in_flights = one_f_one_b_in_flight(ranks, micro_batches, u32::MAX);
        group.throughput(Throughput::Elements(2 * u64::from(ranks) * u64::from(micro_batches)));
        // The largest case takes long enough for ten samples to be stable.
        if ranks == 1024 {
            group.sample_size(10);
        }
        group.bench_function(format!("{ranks}x{micro_batches}"), |bencher| {
            bencher.iter(|| one_f_one_b(black_box(&max_in_flights), micro_batches));
        });
    }
    group.finish();
}

/// Measures schedules that are built by simulating rules in virtual time.
fn searched_schedules(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("search");
    group.sample_size(10);
    for name in ["zb", "v_half", "v_min", "hanayo"] {
        let request = Request::new(16, 128);
        group.bench_function(BenchmarkId::new(name, "16x128"), |bencher| {
            bencher.iter(|| build(name, black_box(&request)).expect("within its limits"));
        });
    }
    // With a low activation limit no bound ends the search early.
    let tight = Request { activation_limit: Some(16), ..Request::new(16, 128) };
    group.bench_function("zb/16x128, limit 16", |bencher| {
        bencher.iter(|| build("zb", black_box(&tight)).expect("within its limits"));
    });
    group.finish();
}

criterion_group!(benches, static_schedules, sizes, searched_schedules);
criterion_main!(benches);
