{{- define "trellis.name" -}}
{{- if contains "trellis" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-trellis" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "trellis.labels" -}}
app.kubernetes.io/name: trellis
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "trellis.selector" -}}
app.kubernetes.io/name: trellis
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "trellis.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "trellis.scheme" -}}
{{ if .Values.tls.secretName }}https{{ else }}http{{ end }}
{{- end }}

{{- define "trellis.memoryClaim" -}}
{{ .Values.memory.existingClaim | default (printf "%s-memory" (include "trellis.name" .)) }}
{{- end }}

{{- define "trellis.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "trellis.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: ["ALL"]
{{- end }}

{{- define "trellis.probes" -}}
startupProbe:
  httpGet: {path: /system/live, port: health}
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /system/live, port: health}
  periodSeconds: 10
  timeoutSeconds: 3
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /system/ready, port: health}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
{{- end }}

{{- define "trellis.files" -}}
- name: tmp
  emptyDir: {sizeLimit: 256Mi}
- name: keys
  secret:
    secretName: {{ .Values.secrets.keys }}
    defaultMode: 0440
- name: policy
  configMap:
    name: {{ include "trellis.name" . }}-policy
{{- if .Values.tls.secretName }}
- name: tls
  secret:
    secretName: {{ .Values.tls.secretName }}
    defaultMode: 0440
{{- end }}
{{- end }}

{{- define "trellis.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: keys, mountPath: /etc/trellis/keys, readOnly: true}
- {name: policy, mountPath: /etc/trellis/policy, readOnly: true}
{{- if .Values.tls.secretName }}
- {name: tls, mountPath: /etc/trellis/tls, readOnly: true}
{{- end }}
{{- end }}
