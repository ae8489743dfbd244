{{/* Parts of the manifests. The argument is (dict "root" $ "role" ROLE), except where a comment names another one. */}}

{{- define "adam.labels" -}}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/name: adam-async
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "adam.metadata" -}}
name: {{ .root.Release.Name }}-{{ .role }}
labels:
  {{- include "adam.labels" . | nindent 2 }}
{{- end }}

{{/* Addresses of all controllers; their pods keep these names wherever they run. The argument is the root. */}}
{{- define "adam.controllers" -}}
{{- $root := . -}}
{{- range $number := until (int .Values.controllers) -}}
{{- if $number }},{{ end -}}
tcp://{{ $root.Release.Name }}-controller-{{ $number }}.{{ $root.Release.Name }}-controller:7070
{{- end -}}
{{- end }}

{{/* Without a service the pods of a role have no names; not ready ones need theirs, too. */}}
{{- define "adam.service" -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "adam.metadata" . | nindent 2 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    {{- include "adam.labels" . | nindent 4 }}
  ports:
    - {name: adam, port: 7070, protocol: TCP}
{{- end }}

{{/* Evict no pod whose loss would end the run. The further argument "spare" is the number of pods that may be away. */}}
{{- define "adam.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "adam.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ .spare }}
  selector:
    matchLabels:
      {{- include "adam.labels" . | nindent 6 }}
{{- end }}

{{- define "adam.claim" -}}
accessModes: [ReadWriteOnce]
{{- if .root.Values.storage.class }}
storageClassName: {{ .root.Values.storage.class }}
{{- end }}
resources:
  requests:
    storage: {{ .size }}
{{- end }}

{{/* Words of the command about code of the user. Kubernetes would replace "$(NAME)" by a variable. */}}
{{- define "adam.code" -}}
{{- $values := .root.Values -}}
{{- range $folder := $values.stepPath }}
- --step-path
- {{ $folder | replace "$(" "$$(" | quote }}
{{- end }}
{{- if or (eq .role "worker") (eq .role "driver") }}
{{- range $layer := $values.layers }}
- --layer
- {{ $layer | replace "$(" "$$(" | quote }}
{{- end }}
{{- end }}
{{- if eq .role "ps" }}
{{- range $rule := $values.allowRules }}
- --allow-rule
- {{ $rule | quote }}
{{- end }}
{{- end }}
{{- if and $values.step (eq .role "worker") }}
- --allow-step
- {{ $values.step | regexFind "^[^:]*" | quote }}
{{- end }}
{{- if and $values.step (eq .role "driver") }}
- --step
- {{ $values.step | quote }}
{{- if $values.stepArgs }}
- --step-args
- {{ $values.stepArgs | replace "$(" "$$(" | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "adam.security" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
# A later mount leaves the private files of a controller private.
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Settings of a container that need no role of its own: image, rights, size. */}}
{{- define "adam.container" -}}
{{- $size := index .root.Values.resources .role -}}
image: {{ .root.Values.image | quote }}
resources:
  requests: {cpu: {{ $size.cpu | quote }}, memory: {{ $size.memory | quote }}}
  limits: {cpu: {{ $size.cpu | quote }}, memory: {{ $size.memory | quote }}}
securityContext:
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
  readOnlyRootFilesystem: true
{{- end }}

{{/* Keep pods of a role on different nodes; without `spread` that is a preference. */}}
{{- define "adam.placement" -}}
{{- if .root.Values.spread -}}
# A required even spread would put a second pod on each node once every node has one.
affinity:
  podAntiAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "adam.labels" . | nindent 12 }}
{{- else -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "adam.labels" . | nindent 8 }}
{{- end -}}
{{- end }}

{{/* The template of the pods of a role. */}}
{{- define "adam.template" -}}
{{- $values := .root.Values -}}
{{- $name := .root.Release.Name -}}
metadata:
  labels:
    {{- include "adam.labels" . | nindent 4 }}
spec:
  automountServiceAccountToken: false
  # Variables such as ADAM_PS_PORT would read as options of the commands.
  enableServiceLinks: false
  securityContext:
    {{- include "adam.security" . | nindent 4 }}
  # Most roles need two seconds; a data server may wait longer for its disk.
  terminationGracePeriodSeconds: 60
  {{- if eq .role "driver" }}
  restartPolicy: Never
  {{- end }}
  {{- if not (or (eq .role "driver") (eq .role "worker")) }}
  {{- include "adam.placement" . | nindent 2 }}
  {{- end }}
  containers:
    - name: {{ .role }}
      {{- include "adam.container" . | nindent 6 }}
      workingDir: /srv/adam/config
      command:
        - adam-async
        {{- if eq .role "driver" }}
        # One command for each start: take the run over, continue from a checkpoint, or begin.
        - train
        - --controller
        - {{ include "adam.controllers" .root }}
        - --attach
        - --no-processes
        - --resume
        - /srv/adam/results/checkpoints
        - --out
        - /srv/adam/results/model
        {{- else }}
        - role
        - --from-env
        {{- end }}
        - --config
        - /srv/adam/config/adam.toml
        - --wait
        - {{ $values.wait | quote }}
        - --health
        - tcp://$(POD_IP):8080
        {{- if $values.metrics }}
        - --metrics
        {{- end }}
        {{- if eq .role "controller" }}
        - --dir
        - /srv/adam/state
        {{- end }}
        {{- if ne .role "controller" }}
        {{- include "adam.code" . | nindent 8 }}
        {{- end }}
      env:
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - name: ADAM_TOKEN
          valueFrom:
            secretKeyRef:
              name: {{ default (printf "%s-keys" $name) $values.secret }}
              key: {{ .role }}
        {{- if ne .role "driver" }}
        - {name: ADAM_CONTROLLER, value: {{ include "adam.controllers" .root | quote }}}
        {{- end }}
        - {name: ADAM_CONTROLLERS, value: {{ $values.controllers | quote }}}
        - {name: ADAM_SERVERS, value: {{ $values.servers | quote }}}
        - {name: ADAM_COPIES, value: {{ $values.copies | quote }}}
        - {name: ADAM_DATA_SERVERS, value: {{ $values.dataServers | quote }}}
        - {name: ADAM_REPLICAS, value: {{ $values.replicas | quote }}}
        - {name: ADAM_PARTITIONS, value: {{ $values.partitions | quote }}}
        {{- if and $values.spill (eq .role "data") }}
        - {name: ADAM_SPILL, value: /srv/adam/tmp/spill}
        {{- end }}
        - {name: HOME, value: /srv/adam/tmp}
        - {name: TMPDIR, value: /srv/adam/tmp}
        - {name: XDG_CACHE_HOME, value: /srv/adam/tmp/cache}
        - {name: PYTHONDONTWRITEBYTECODE, value: "1"}
      ports:
        {{- if ne .role "driver" }}
        - {name: adam, containerPort: 7070, protocol: TCP}
        {{- end }}
        - {name: health, containerPort: 8080, protocol: TCP}
      startupProbe:
        httpGet: {path: /healthz, port: health}
        periodSeconds: 2
        timeoutSeconds: 5
        failureThreshold: 60
      livenessProbe:
        httpGet: {path: /healthz, port: health}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        httpGet: {path: /readyz, port: health}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      volumeMounts:
        - {name: config, mountPath: /srv/adam/config, readOnly: true}
        - {name: temporary, mountPath: /srv/adam/tmp}
        {{- if eq .role "controller" }}
        - {name: state, mountPath: /srv/adam/state}
        {{- end }}
        {{- if eq .role "driver" }}
        - {name: results, mountPath: /srv/adam/results}
        {{- end }}
        {{- if and $values.dataClaim (eq .role "data") }}
        - {name: data, mountPath: /srv/adam/data, readOnly: true}
        {{- end }}
  volumes:
    - name: config
      configMap: {name: {{ $name }}-config}
    - name: temporary
      emptyDir: {sizeLimit: {{ $values.storage.temporary | quote }}}
    {{- if eq .role "driver" }}
    - name: results
      persistentVolumeClaim: {claimName: {{ $name }}-results}
    {{- end }}
    {{- if and $values.dataClaim (eq .role "data") }}
    - name: data
      persistentVolumeClaim: {claimName: {{ $values.dataClaim }}, readOnly: true}
    {{- end }}
{{- end }}
