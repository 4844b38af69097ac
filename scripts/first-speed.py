"""Turns the reports of scripts/first-speed into a table: medians, ranges and ratios of interleaved rounds."""
import glob
import json
import os
import statistics
import sys

runs = {}
environment = {}
for path in sorted(glob.glob(os.path.join(sys.argv[1], "*-*.json"))):
    mode, depth, who, _ = os.path.basename(path)[:-5].split("-")
    report = json.load(open(path))
    latency = report["histograms_ns"]["latency"]
    figures = (report["achieved_rate"], latency["p50"] / 1000, latency["p99"] / 1000, latency["p99.9"] / 1000)
    runs.setdefault((mode, int(depth)), {}).setdefault(who, []).append(figures)
    environment = report["environment"]


def shown(values):
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:,.0f} ({low:,.0f}–{high:,.0f})"


print(f"{environment.get('cpu')}, kernel {environment.get('kernel')}, {environment.get('cpus')} CPUs\n")
print("| flush | in flight | broker | msg/s | p50 µs | p99 µs | p99.9 µs | ratio of rates, median (range) |")
print("|---|---|---|---|---|---|---|---|")
for (mode, depth), both in sorted(runs.items()):
    pairs = list(zip(both.get("pinion", []), both.get("apache", [])))
    ratios = [ours[0] / theirs[0] for ours, theirs in pairs]
    for who in ("apache", "pinion"):
        columns = [shown(column) for column in zip(*both.get(who, []))]
        ratio = ""
        if who == "pinion" and ratios:
            ratio = f"{statistics.median(ratios):.1f} ({min(ratios):.1f}–{max(ratios):.1f})"
        print(f"| {mode}_FLUSH | {depth} | {who} | {' | '.join(columns)} | {ratio} |")
