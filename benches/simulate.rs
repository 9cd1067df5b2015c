//! Benchmark of simulations. Results are in `research/benchmark-tables.md`, section "Simulation".

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use hpgo::Control;
use hpgo::schedule::{Request, Schedule, build};
use hpgo::simulate::{Communication, Costs, Links, StageTimes, Sweep, Transfer, events, measure, slack_s};

/// Returns costs with unequal stages, so that ranks wait for each other, and with transfers that occupy links.
fn costs(schedule: &Schedule) -> Costs {
    let stages = schedule.rank_of_stage.len();
    let transfers = vec![Transfer { busy_s: 0.1, latency_s: 0.01 }; stages];
    let compute = (0..stages).map(|stage| StageTimes::new(1.0 + 0.01 * (stage % 7) as f64, 2.0)).collect();
    Costs { activation: transfers.clone(), gradient: transfers, ..Costs::of_stages(compute) }
}

fn one_f_one_b(ranks: u32, micro_batches: u32) -> (Schedule, Costs, Throughput) {
    let schedule = build("1f1b", &Request::new(ranks, micro_batches)).expect("within its limits");
    let costs = costs(&schedule);
    let actions = Throughput::Elements(schedule.action_count() as u64);
    (schedule, costs, actions)
}

fn sweeps(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("sweep");
    for (ranks, micro_batches) in [(8, 64), (64, 1024), (1024, 4096)] {
        let (schedule, costs, actions) = one_f_one_b(ranks, micro_batches);
        // The largest case has 8.4 million actions, so more samples would take minutes.
        group.throughput(actions).sample_size(if ranks == 1024 { 10 } else { 50 });
        // Reused across iterations, like in the planner, so that allocation is not measured.
        let mut sweep = Sweep::default();
        group.bench_function(format!("step time {ranks}x{micro_batches}"), |bencher| {
            bencher.iter(|| sweep.step_s(black_box(&schedule), &costs, Links::Queued));
        });
        group.bench_function(format!("all times {ranks}x{micro_batches}"), |bencher| {
            bencher.iter(|| sweep.times(black_box(&schedule), &costs, Links::Queued));
        });
    }
    group.finish();
}

fn heaps_of_events(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("events");
    let (schedule, costs, actions) = one_f_one_b(64, 1024);
    group.throughput(actions).sample_size(10);
    for (name, communication) in [
        ("link", Communication::Link),
        ("stream", Communication::Stream { deferred_receives: false }),
        ("rendezvous", Communication::Rendezvous),
    ] {
        group.bench_function(format!("{name} 64x1024"), |bencher| {
            bencher.iter(|| events::times(black_box(&schedule), &costs, communication, 1, &Control::default()));
        });
    }
    group.finish();
}

fn measures(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("measures");
    let (schedule, costs, actions) = one_f_one_b(64, 1024);
    let times = Sweep::default().times(&schedule, &costs, Links::Queued).expect("valid");
    group.throughput(actions).sample_size(20);
    group.bench_function("measures and idle time by cause 64x1024", |bencher| {
        bencher.iter(|| measure(black_box(&schedule), &costs, &times, &Control::default()));
    });
    group.bench_function("slack 64x1024", |bencher| {
        bencher.iter(|| slack_s(black_box(&schedule), &costs, &times, &Control::default()));
    });
    group.finish();
}

criterion_group!(benches, sweeps, heaps_of_events, measures);
criterion_main!(benches);
