//! Benchmark of chain partitions at sizes where a search over every multiset of host types no longer ends.
//!
//! Run with `cargo bench --bench chain`. Each case prints its gap once, so that a fast answer without a proof is
//! visible.

#![allow(missing_docs, clippy::print_stdout, reason = "criterion's macros, and the gaps beside its figures")]

use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use hpgo::Control;
use hpgo::planner::chain::{Chain, ChainPlan, Hop, HostType, Objective, partition};

/// Random numbers between 0 and 1 with a fixed sequence (xorshift).
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// Creates a vision transformer with four layers per block, and hosts that differ in speed (each layer ±15 %),
/// bandwidth and memory.
fn transformer(layers: usize, types: usize, hosts: usize, host_mib: f64) -> Chain {
    let mut noise = Noise(0x9E37_79B9_7F4A_7C15);
    let block_s = [0.34, 0.08, 0.35, 0.30];
    let block_values = [303e3, 151e3, 756e3, 151e3];
    let block_mib = [26.8, 18.9, 26.5, 25.9];
    let hosts_of = |number: usize, noise: &mut Noise| {
        let speed = 0.4 + 1.6 * noise.next();
        let time_s = (0..layers).map(|layer| block_s[layer % 4] * speed * (0.85 + 0.3 * noise.next())).collect();
        HostType::new(&format!("type{number}"), hosts, host_mib * 1_048_576.0, time_s)
    };
    let kinds: Vec<HostType> = (0..types).map(|number| hosts_of(number, &mut noise)).collect();
    let ports: Vec<f64> = (0..types).map(|number| [100.0, 500.0, 1000.0][number % 3] * 131_072.0).collect();
    let batch_bytes = 8.0 * 4.0;
    let cut_bytes = std::iter::once(150e3).chain((0..layers).map(|layer| block_values[layer % 4]));
    let link = |one: &f64, other: &f64| Hop { bytes_per_s: one.min(*other), latency_s: 0.0 };
    Chain {
        links: ports.iter().map(|one| ports.iter().map(|other| link(one, other)).collect()).collect(),
        buffers_in: 2,
        buffers_out: 2,
        ..Chain::new(
            (0..layers).map(|layer| block_mib[layer % 4] * 1_048_576.0).collect(),
            cut_bytes.map(|values| values * batch_bytes).collect(),
            kinds,
        )
    }
}

fn plan(chain: &Chain) -> ChainPlan {
    // The same deadline as `hpgo partition` has by default, so that figures show what a user waits for.
    let control = Control::with_deadline(Some(Duration::from_secs(10)));
    partition(chain, Objective::Throughput, None, &control).expect("the hosts have room")
}

fn mixed_hosts(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("mixed hosts");
    group.sample_size(10);
    for (name, chain) in [
        ("48 layers, 7 types x 4 hosts", transformer(48, 7, 4, 2048.0)),
        ("48 layers, 14 distinct hosts", transformer(48, 14, 1, 2048.0)),
        ("1536 layers, 8 hosts of one type", transformer(1536, 1, 8, 65_536.0)),
        ("1536 layers, 8 distinct hosts", transformer(1536, 8, 1, 65_536.0)),
        ("96 layers, 20 distinct hosts", transformer(96, 20, 1, 2048.0)),
        ("96 layers, 20 distinct hosts, little memory", transformer(96, 20, 1, 250.0)),
        ("96 layers, 8 types x 16 hosts", transformer(96, 8, 16, 2048.0)),
        ("96 layers, 10 types x 20 hosts", transformer(96, 10, 20, 2048.0)),
    ] {
        let answer = plan(&chain);
        // Criterion reports times only, and a fast answer without a proof would look like an improvement.
        println!("{name}: gap {:.3} %", 100.0 * (answer.value / answer.lower_bound - 1.0));
        group.bench_function(name, |bencher| bencher.iter(|| plan(&chain)));
    }
    group.finish();
}

criterion_group!(benches, mixed_hosts);
criterion_main!(benches);
