{{- /* A tree as TOML: dict "tree" "path". Values first, then sections, as TOML wants it. Text is quoted as in JSON, which TOML reads, and so are
keys that are more than a word: a dot in them would otherwise make a section. */ -}}
{{- define "baton.toml" -}}
{{- $tree := .tree -}}
{{- $path := .path -}}
{{- range $key := keys $tree | sortAlpha -}}
{{- $value := get $tree $key -}}
{{- if not (kindIs "map" $value) }}
{{ include "baton.toml.key" $key }} = {{ include "baton.toml.value" $value }}
{{- end -}}
{{- end -}}
{{- range $key := keys $tree | sortAlpha -}}
{{- $value := get $tree $key -}}
{{- if and (kindIs "map" $value) $value }}
{{- $inner := printf "%s%s" (ternary (printf "%s." $path) "" (ne $path "")) (include "baton.toml.key" $key) }}
[{{ $inner }}]
{{- include "baton.toml" (dict "tree" $value "path" $inner) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "baton.toml.key" -}}
{{- if regexMatch "^[A-Za-z0-9_-]+$" . -}}{{ . }}{{- else -}}{{ . | toJson }}{{- end -}}
{{- end -}}

{{- /* Whole numbers of values files are floats once they are read, and TOML tells the two apart. */ -}}
{{- define "baton.toml.value" -}}
{{- if kindIs "slice" . -}}
[{{ range $i, $item := . }}{{ if $i }}, {{ end }}{{ include "baton.toml.value" $item }}{{ end }}]
{{- else if kindIs "float64" . -}}
{{- if eq (floor .) . }}{{ printf "%d" (int64 .) }}{{ else }}{{ . }}{{ end -}}
{{- else -}}
{{- . | toJson -}}
{{- end -}}
{{- end -}}

{{- /* Sections that every process has: dict "root" "drain". JSON, to be merged. */ -}}
{{- define "baton.config.common" -}}
{{- $values := .root.Values -}}
{{- $telemetry := dict "log" $values.telemetry.log "log_format" $values.telemetry.logFormat "trace_sample_ratio" $values.telemetry.traceSampleRatio -}}
{{- with $values.telemetry.otlpUrl -}}{{- $_ := set $telemetry "otlp_url" . -}}{{- end -}}
{{- with $values.telemetry.otlpCa -}}
{{- if .secret -}}
{{- if not (hasPrefix "https://" $values.telemetry.otlpUrl) -}}{{- fail "telemetry.otlpCa.secret is for a collector over TLS: telemetry.otlpUrl must begin with https://" -}}{{- end -}}
{{- $_ := set $telemetry "otlp_ca_file" (printf "/etc/baton/otlp/%s" .key) -}}
{{- end -}}
{{- end -}}
{{- $etcd := dict "endpoints" (include "baton.etcd.endpoints" .root | fromJsonArray) "prefix" (include "baton.etcd.prefix" .root) "lease_ttl_s" $values.etcd.leaseSeconds -}}
{{- if include "baton.etcd.tls" .root -}}
{{- $_ := set $etcd "ca" "/etc/baton/etcd/ca.crt" -}}
{{- if $values.etcd.external.clientCertificate -}}
{{- $_ := set $etcd "cert" "/etc/baton/etcd/tls.crt" -}}
{{- $_ := set $etcd "key" "/etc/baton/etcd/tls.key" -}}
{{- end -}}
{{- end -}}
{{- if include "baton.etcd.password" .root -}}
{{- $_ := set $etcd "user" $values.etcd.external.user -}}
{{- $_ := set $etcd "password_file" (printf "/etc/baton/etcd-password/%s" $values.etcd.external.password.key) -}}
{{- end -}}
{{- $any := ternary "[::]" "0.0.0.0" (eq $values.ipFamily "ipv6") -}}
{{- $identity := dict "insecure" true -}}
{{- if $values.identity.enabled -}}{{- $identity = dict "dir" "/etc/baton/identity" -}}{{- end -}}
{{- dict "identity" $identity "telemetry" $telemetry "drain" (dict "drain_ms_max" (mul (int64 .drain.seconds) 1000)) "admin" (dict "listen" (printf "%s:9090" $any)) "membership" (dict "backend" "etcd" "etcd" $etcd) | toJson -}}
{{- end -}}

{{- /* Configuration of routers, as TOML. */ -}}
{{- define "baton.config.router" -}}
{{- $any := ternary "[::]" "0.0.0.0" (eq .Values.ipFamily "ipv6") -}}
{{- $config := include "baton.config.common" (dict "root" . "drain" .Values.router.drain) | fromJson -}}
{{- $_ := set $config "grpc" (dict "listen" (printf "%s:50051" $any)) -}}
{{- /* Where everybody would be taken for an operator, nobody outside of the pod is let in. */ -}}
{{- $_ := set $config "cluster" (dict "listen" (ternary (printf "%s:50052" $any) "127.0.0.1:50052" .Values.identity.enabled)) -}}
{{- $_ := set $config "http" (dict "listen" (printf "%s:8000" $any)) -}}
{{- if .Values.router.tls.secret -}}{{- $_ := set $config "tls" (dict "dir" "/etc/baton/tls") -}}{{- end -}}
{{- $seeds := list -}}
{{- range $role := list "prefill" "decode" -}}
{{- $seeds = append $seeds (printf "%s.%s.svc.%s:50052" (include "baton.name" (dict "root" $ "part" (printf "%s-workers" $role))) $.Release.Namespace $.Values.clusterDomain) -}}
{{- end -}}
{{- $_ := set $config.membership "seeds" $seeds -}}
{{- $_ := set $config "placement" (dict "prefill_policy" .Values.router.prefillPolicy "policy" .Values.router.placementPolicy) -}}
{{- $cache := dict "enabled" .Values.router.cache.enabled "ttl_ms_max" (mul (int64 .Values.router.cache.ttlSecondsMax) 1000) "pin_ms_max" (mul (int64 .Values.router.cache.pinSecondsMax) 1000) -}}
{{- if not (kindIs "invalid" .Values.router.cache.ttlSeconds) -}}{{- $_ := set $cache "ttl_ms" (mul (int64 .Values.router.cache.ttlSeconds) 1000) -}}{{- end -}}
{{- with .Values.router.cache.pins -}}{{- $pins := dict -}}{{- range $tenant, $seconds := . -}}{{- $_ := set $pins $tenant (mul (int64 $seconds) 1000) -}}{{- end -}}{{- $_ := set $cache "pins" $pins -}}{{- end -}}
{{- $_ := set $config "cache" $cache -}}
{{- if .Values.router.prices.models -}}{{- $_ := set $config "prices" .Values.router.prices -}}{{- end -}}
{{- if include "baton.auth.secret" . -}}{{- $_ := set $config "auth" (dict "keys_file" "/etc/baton/auth/keys") -}}{{- end -}}
{{- include "baton.toml" (dict "tree" (mergeOverwrite $config (deepCopy .Values.router.config)) "path" "") -}}
{{- end -}}

{{- /* Configuration of a pool of workers, as TOML: dict "root" "model" "pool". */ -}}
{{- define "baton.config.worker" -}}
{{- $any := ternary "[::]" "0.0.0.0" (eq .root.Values.ipFamily "ipv6") -}}
{{- $config := include "baton.config.common" . | fromJson -}}
{{- $engine := .pool.engine -}}
{{- $_ := set $config "grpc" (dict "listen" (printf "%s:50052" $any)) -}}
{{- $_ := set $config "instance" (dict "pool" .pool.name "labels" .pool.instanceLabels) -}}
{{- $_ := set $config "model" (dict "model" (include "baton.source" .model) "served_names" (prepend .model.servedNames .model.name | uniq) "max_model_len" .model.maxModelLen "cache_dir" "/cache") -}}
{{- $_ := set $config "engine" (dict "device" $engine.device "threads" $engine.threads "kv_cache_bytes" $engine.kvCacheBytes "block_tokens" $engine.blockTokens "chunk_tokens_max" $engine.chunkTokensMax "running_max" $engine.runningMax "waiting_max" $engine.waitingMax "prefix_cache" (include "baton.config.prefixCache" $engine.prefixCache | fromJson) "packed_cache" (dict "bytes_max" 0)) -}}
{{- if eq $engine.device "cuda" -}}{{- $_ := set $config.engine "gpu_memory_utilization" $engine.gpuMemoryUtilization -}}{{- end -}}
{{- with include "baton.config.adapters" . -}}{{- $_ := set $config.engine "lora" (fromJson .) -}}{{- end -}}
{{- $transfer := dict "transport" (ternary "ucx" "auto" (not (empty .pool.rdma.resource))) -}}
{{- with .pool.rdma.lanes -}}{{- $_ := set $transfer "ucx_tls" . -}}{{- end -}}
{{- with .pool.rdma.devices -}}{{- $_ := set $transfer "ucx_net_devices" . -}}{{- end -}}
{{- $_ := set $config "transfer" $transfer -}}
{{- include "baton.toml" (dict "tree" (mergeOverwrite $config (deepCopy .model.config) (deepCopy .pool.config)) "path" "") -}}
{{- end -}}

{{- /* Adapters of the model; empty if it has none. */ -}}
{{- define "baton.config.adapters" -}}
{{- $adapters := .model.adapters -}}
{{- if $adapters.folder -}}
{{- if eq .pool.engine.device "cuda" -}}
{{- fail (printf "models: adapters of %q: they are computed on CPUs, and pool %q is on a GPU" .model.name .pool.name) -}}
{{- end -}}
{{- $folder := $adapters.folder -}}
{{- if not (hasPrefix "/" $folder) -}}
{{- if not (or .model.weights.claim .model.weights.image) -}}
{{- fail (printf "models: adapters of %q: the folder %q is a path on the volume of the weights, and there is none: give weights.claim, weights.image, or an absolute path of extraVolumeMounts" .model.name $folder) -}}
{{- end -}}
{{- $folder = printf "/weights/%s" $folder -}}
{{- end -}}
{{- dict "folder" $folder "max_loras" $adapters.loadedMax "max_rank" $adapters.rankMax "memory_bytes_max" $adapters.bytesMax | toJson -}}
{{- end -}}
{{- end -}}

{{- define "baton.config.prefixCache" -}}
{{- dict "enabled" .enabled "ttl_ms" (mul (int64 .ttlSeconds) 1000) "pinned_percent_max" .pinnedPercentMax "pinned_percent_of_one_max" .pinnedPercentOfOneMax | toJson -}}
{{- end -}}

{{- /* What a model's workers load: paths that are not absolute lie on the volume of its weights. */ -}}
{{- define "baton.source" -}}
{{- $volume := or .weights.claim .weights.image -}}
{{- if and $volume (hasPrefix "/" .source) (not (hasPrefix "/weights/" (printf "%s/" .source))) -}}
{{- fail (printf "models: source %q of %q does not lie on the volume of its weights, which is mounted at /weights: give a path on it" .source .name) -}}
{{- else if and $volume (not (hasPrefix "/" .source)) -}}
{{- printf "/weights/%s" .source -}}
{{- else -}}
{{- .source -}}
{{- end -}}
{{- end -}}

{{- /* All pools of a role, with their defaults, as JSON: dict "root" "role". */ -}}
{{- define "baton.pools" -}}
{{- $root := .root -}}
{{- $role := .role -}}
{{- $pools := list -}}
{{- $seen := dict -}}
{{- $objects := dict -}}
{{- range $given := $root.Values.models -}}
{{- $model := mergeOverwrite (dict "servedNames" list "maxModelLen" 0 "weights" dict "adapters" (dict "folder" "" "loadedMax" 8 "rankMax" 64 "bytesMax" "1GiB") "engine" dict "config" dict "prefill" list) (deepCopy $given) -}}
{{- if eq (get $seen $model.name) $model.name -}}{{- fail (printf "models: two are named %q" $model.name) -}}{{- end -}}
{{- range $served := prepend $model.servedNames $model.name | uniq -}}
{{- with get $seen $served -}}{{- fail (printf "models: %q and %q would both be served as %q: names and servedNames must differ" . $model.name $served) -}}{{- end -}}
{{- $_ := set $seen $served $model.name -}}
{{- end -}}
{{- $names := dict -}}
{{- range $own := get $model $role -}}
{{- if hasKey $names $own.name -}}{{- fail (printf "models: %q has two %s pools named %q" $model.name $role $own.name) -}}{{- end -}}
{{- $_ := set $names $own.name true -}}
{{- $pool := mergeOverwrite (deepCopy (get $root.Values $role)) (dict "engine" (deepCopy $model.engine)) (deepCopy $own) -}}
{{- $name := include "baton.name" (dict "root" $root "part" (printf "%s-%s-%s" $role $model.name $pool.name)) -}}
{{- $what := printf "%s pool %q of model %q" $role $pool.name $model.name -}}
{{- with get $objects $name -}}{{- fail (printf "models: %s and %s would both be %s: rename a model or a pool" . $what $name) -}}{{- end -}}
{{- $_ := set $objects $name $what -}}
{{- $pools = append $pools (dict "name" $name "role" $role "model" $model "pool" $pool "drain" $pool.drain) -}}
{{- end -}}
{{- end -}}
{{- $pools | toJson -}}
{{- end -}}
